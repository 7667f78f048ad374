"""What shows that the promises hold: injected faults, kill tests, comparisons from outside."""
