"""DAMON schemes as typed records, written to sysfs in the order that the kernel wants, on the host or in a guest."""
