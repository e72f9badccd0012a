"""Loss-spike detection, gradient norms, snapshots and the guard that rolls a run back."""
