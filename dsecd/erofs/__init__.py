"""Images: import into EROFS, the store, read-only mounts that are shared and counted, and stacks of layers.

`jobs.run_import` makes images, `store.ImageStore` keeps them, `mount.MountTable` mounts them, `compose.compose` stacks
them. Nothing here knows who uses a mount.
"""
