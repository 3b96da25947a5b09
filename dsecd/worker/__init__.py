"""The program of a rollout's worker, inside its container: `python3 -m dsecd.worker`. Knows the SDK and no room."""
