"""The families, one file each; `registry` finds them by name. A family may know the contract and kernels, and
no other family."""
