"""The container backend: OCI bundle, runtime, cgroup, the link to PID 1. Knows nothing of images' bytes."""
