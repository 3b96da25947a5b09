"""Virtual machines: Firecracker and QEMU behind one `Machine`, guest kernels, the microVM and full-VM backends."""
