"""Methods that add to the attention logits, or replace them."""
