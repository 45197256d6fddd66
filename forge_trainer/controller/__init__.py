"""What a call does on the controller: a trainer's handle, ranks, batches, publishing."""
