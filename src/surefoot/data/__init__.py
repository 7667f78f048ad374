"""From documents to batches. A batch is a pure function of (config, seed, batch_index, exclusions)."""
