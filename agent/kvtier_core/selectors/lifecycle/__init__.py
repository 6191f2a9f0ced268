"""How indexes come to be, grow and go, beside the steps that ask them."""
