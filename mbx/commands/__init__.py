"""Commands of `mbx NAME`: one module each, with `main(arguments)`."""
