"""Image classifiers with MHLA and beside it: pictures, training, what is compared, accuracy over a folder."""
