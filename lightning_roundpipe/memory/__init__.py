"""Host memory: flat parameter buffers, parameter buckets, gradient sums, module buffers, dtypes."""
