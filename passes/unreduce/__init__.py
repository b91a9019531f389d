"""From the loss of the batch to the losses of its samples."""
