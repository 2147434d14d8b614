"""Host memory: flat parameters, buckets that are updated together, gradient buffers, buffers of layers, dtypes."""
