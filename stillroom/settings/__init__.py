"""The settings of each verb: one frozen dataclass per verb, without heavy imports, so that `stillroom --help` is quick."""
