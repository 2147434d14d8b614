"""Waiting, task threads and cancellation."""
