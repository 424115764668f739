"""Expert parallelism: token dispatch and combine, and what fits them into models."""
