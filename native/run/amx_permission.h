// AMX needs more than a CPU that has it: Linux gives its registers, 8 KB a thread, only to processes that ask, and a
// virtual machine may promise what it does not do. In: nothing. Out: whether kernels_amx.cpp can be used. Called by
// cpu.cpp, on CPUs that say they have AMX.
#pragma once

namespace anyprec {

// Asks for permission and tries a product, once; false: refused, or the product was wrong.
bool amx_permission();

// Whether `probe` returns true in a process of its own. There it may crash: no handler of this process runs, nothing is
// printed and no core is dumped.
bool true_in_child(bool (*probe)());

} // namespace anyprec
