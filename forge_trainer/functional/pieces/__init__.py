"""What published weights are made of: manifests over pieces, rectangles, differences."""
