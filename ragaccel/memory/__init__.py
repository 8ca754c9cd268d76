"""Memory: what earlier requests taught; bounded, apart by namespace, kept without pickle."""
