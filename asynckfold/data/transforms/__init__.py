"""Samples, the steps of transforms, and their forms for whole batches.

::

    user's steps    Resize   RandomCrop   RandomHorizontalFlip   ToTensor   Normalize
                    ------   ------------------------------------------------------
    View            prefix   steps, each for a whole batch (B, C, H, W)
                    applied once, result stored as uint8

A random step draws from (seed, epoch, sample number, position of the step) only, so augmentation
does not depend on how samples are batched. From the first random step on, steps without a batched
form run sample by sample (`PerSample`), with the global generators seeded the same way.
"""
