"""What other training tools do on the faults that this project is made for."""
