"""Text to tokens and logits to answers: tokenizer, windows of long texts, labels, span decoding."""
