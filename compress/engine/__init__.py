"""Runs the stages of a method in resumable folders: `distill` and `finetune`, whole."""
