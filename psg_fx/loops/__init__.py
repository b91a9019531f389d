"""A step over a data set: batches of a loader, results in memory or in a folder, queries on them."""
