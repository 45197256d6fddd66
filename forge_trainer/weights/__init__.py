"""Weight stores: where published weights versions live. Each keeps the `WeightStore` protocol."""
