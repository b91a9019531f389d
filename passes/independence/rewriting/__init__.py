"""Rows whose order or number depends on the data, written as all rows where they are, before anything is proven."""
