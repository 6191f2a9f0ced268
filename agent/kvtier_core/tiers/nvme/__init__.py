"""Blocks on flash: format, file, threads, durability, recovery and encryption behind the Tier contract."""

from kvtier_core.tiers.nvme.options import NvmeOptions as NvmeOptions
from kvtier_core.tiers.nvme.tier import NvmeTier as NvmeTier
from kvtier_core.tiers.nvme.verify import sweep_orphans as sweep_orphans
from kvtier_core.tiers.nvme.verify import verify_store as verify_store
