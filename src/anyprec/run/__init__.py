"""Running a trained network without torch: numpy and the C++ engine `anyprec._native`.

`anyprec.run.cpu` tells what the engine found on this machine.
"""
