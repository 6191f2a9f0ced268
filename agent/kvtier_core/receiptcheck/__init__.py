"""Guards over what was claimed: a receipt is compared with its operation before anything of it is published.

Why it exists: bytes of the right shape are not the right bytes, and a completed request is no evidence. Each
module takes the receipt of one kind of work and the live facts, and raises a CoreError with the reason of the
first guard that fails, in the specification's order (A.12, B.1, E.5); so one wrong field has one reason. It
must not know how the work is done.
"""
