"""Devices of the host: what CDI files say a container with one needs, and who has which. Starts and mounts nothing."""
