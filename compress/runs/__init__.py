"""`distill` and `finetune`: they run the stages of a method, each in a folder, and resume where a stopped call was."""
