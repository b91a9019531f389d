"""What code decides by while it is captured: the batch size, small buffers, values that only an error depends on."""
