"""The vocabulary: resource models, the runtime manifest and its digest. Knows no cluster and no tensor."""
