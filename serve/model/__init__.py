"""One model in this process: the session that runs its graph, and the pipeline from text to answer."""
