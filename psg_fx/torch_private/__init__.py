"""Every private torch API that psg_fx uses, in one folder, with what it is for."""
