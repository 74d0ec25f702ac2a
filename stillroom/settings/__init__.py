"""What each verb is told: one frozen dataclass a verb, light enough for `stillroom --help`."""
