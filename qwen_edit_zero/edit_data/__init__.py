"""From manifests and pictures to buckets, the order of samples, and cached batches."""
