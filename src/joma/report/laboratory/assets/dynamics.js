/* The mathematics of the laboratory, without a document: node imports it as a module. */

export * from "./doubledouble.js";
export * from "./special.js";
export * from "./linear.js";
export * from "./eqn6.js";
export * from "./hblt.js";
export * from "./block.js";
export * from "./marginals.js";
