"""What code changes in the Python and the tensors around it: put back, written anew after every step, or refused."""
