"""`distill` and `finetune`: they run the stages of a method, each in a folder, and go on where a stopped call was."""
