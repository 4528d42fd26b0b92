"""What users type: `mbx NAME`, a module each with `main(arguments)`."""
