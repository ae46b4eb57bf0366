"""Language models with MHLA and beside it: texts, training, what is compared."""
