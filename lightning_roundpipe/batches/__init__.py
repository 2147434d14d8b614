"""Microbatches: how batches are cut on request, and how losses, logs and outputs of the parts become the batch's."""
