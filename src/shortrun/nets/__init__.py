"""Networks: generators, their frozen form, encoders and flows."""
