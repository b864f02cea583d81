"""The memory that all models share: bytes booked in one ledger, and where they lie."""
