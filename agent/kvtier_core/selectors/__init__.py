"""Selectors: which rows a query reads. One file per family; rows that are not read stay where they are."""
