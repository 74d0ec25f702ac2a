"""Anything callable -> measurement: candidates in processes of their own take turns; every sample is kept."""
