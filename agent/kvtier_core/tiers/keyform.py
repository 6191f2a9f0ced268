"""What a key of encryption at rest and its reference look like.

Apart from the cipher, so that a command line that names keys is checked, and refused, without importing the
tiers and torch.
"""

KEY_BYTES = 32
MAX_REFERENCE_BYTES = 64
