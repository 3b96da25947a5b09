"""Backing files of virtio-pmem devices: alignment, padding, DAX fitness, what they cost and what they share."""
