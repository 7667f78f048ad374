"""Many runs and bigger ones: trials, sweeps, transfer, what published laws advise. Takes no decision inside a run."""
