"""The lab: train small models that differ in their encoding, and see which hold up."""
