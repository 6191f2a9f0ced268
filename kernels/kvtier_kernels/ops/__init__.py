"""Operations on tensors, one module or folder each."""
