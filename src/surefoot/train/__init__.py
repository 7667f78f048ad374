"""One run: set-up, state, the step, the loop, checkpoints, snapshots, evaluation."""
